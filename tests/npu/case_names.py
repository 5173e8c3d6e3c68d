"""The cases of the conformance suite by name, since the suite itself needs a PyPTO to be imported."""

CASES = (
    "shares_a_resident_tensor",
    "takes_views_of_shared_tensors",
    "loads_a_moved_program",
    "refuses_other_tensors",
    "copies_parts",
    "uploads_whole_tensors",
    "forks_in_prepare",
    "does_not_check_shapes",
    "adds_up_over_two_devices",
    "outlives_its_parent",
)
HANGS = (
    "hangs_when_its_child_is_dead",
    "hangs_when_one_of_two_children_is_dead",
    "hangs_for_tensors_shared_too_late",
)
