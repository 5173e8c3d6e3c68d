"""The layout of `--help`: no name of an option is cut at 80 columns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand


class HelpCommand(TyperCommand):
    """A command whose help lists both names of a switch in one column, which leaves room for long names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        shown = copy.copy(self)
        shown.params = [_in_one_column(parameter) for parameter in self.params]
        TyperCommand.format_help(shown, ctx, formatter)


def in_panels(panels: Mapping[str, Sequence[str]]) -> type[HelpCommand]:
    """Return a kind of command whose help lists parameters under headings; `panels` has their names."""

    class PaneledCommand(HelpCommand):
        def __init__(self, *arguments: Any, **attributes: Any) -> None:
            super().__init__(*arguments, **attributes)
            of = {name: panel for panel, names in panels.items() for name in names}
            for parameter in self.params:
                parameter.rich_help_panel = of.get(parameter.name)  # type: ignore[attr-defined]

    return PaneledCommand


def _in_one_column(parameter: Any) -> Any:
    if not parameter.secondary_opts:
        return parameter
    shown = copy.copy(parameter)
    shown.opts, shown.secondary_opts = ["\n".join((*parameter.opts, *parameter.secondary_opts))], []
    return shown
