// The list of conversations: open, search, rename, delete with undo, import and export.

import { download, h, icon, iconButton, notify, pickFiles } from "./dom.js";
import { ago } from "./format.js";
import { allChats, listChats, loadChat, removeChat, saveChat } from "./store.js";
import { readChats, writeChats } from "./transfer.js";

const UNTITLED = "Untitled";

/** Fill the panel in. `does` has open(id), fresh(), dropped(id), restored(chat), renamed(id, title); `state` says of an id whether it is current, busy, new. */
export class ChatList {
  constructor(panel, does, state) {
    this.does = does;
    this.state = state;
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", input: () => this.show() });
    this.list = h("ul", { class: "list" });
    const fresh = h("button", { type: "button", class: "button", click: () => does.fresh() }, icon("plus"), "New chat");
    const foot = h(
      "div",
      { class: "row foot-buttons" },
      h("button", { type: "button", class: "button small", title: "Add conversations from a file", click: () => this.importFiles() }, icon("upload"), "Import"),
      h("button", { type: "button", class: "button small", title: "Save all conversations as a file", click: () => download("conversations.json", writeChats(allChats())) }, icon("download"), "Export all"),
    );
    panel.replaceChildren(fresh, this.search, this.list, foot);
  }

  /** Show the list as it is now; what has the focus keeps it. A name that is being typed stays. */
  show() {
    if (this.renaming) return;
    const focused = document.activeElement.closest?.(".list button");
    const [id, kind] = focused ? [focused.closest("li").dataset.id, focused.dataset.kind] : [];
    const found = listChats(this.search.value);
    const empty = this.search.value.trim() ? "No conversation has this text." : "Conversations will be listed here.";
    this.list.replaceChildren(...(found.length ? found.map((chat) => this.row(chat)) : [h("li", { class: "muted empty" }, empty)]));
    if (id) this.button(id, kind)?.focus();
  }

  button(id, kind) {
    return [...this.list.querySelectorAll("button")].find((each) => each.dataset.kind === kind && each.closest("li").dataset.id === id);
  }

  row({ id, title, updated }) {
    const name = title || UNTITLED;
    const { current, busy, unread } = this.state(id);
    const sign = busy ? h("span", { class: "sign busy" }, "answering") : unread ? h("span", { class: "sign" }, "new answer") : null;
    const when = h("span", { class: "when muted figures" }, h("time", {}, ago(updated)), sign);
    return h(
      "li",
      { "data-id": id },
      h("button", { type: "button", class: "pick", "data-kind": "pick", title: name, "aria-current": current ? "true" : null, click: () => this.does.open(id) }, h("span", { class: "title" }, name), when),
      iconButton("edit", `Rename ${name}`, () => this.rename(id, title), { "data-kind": "rename" }),
      iconButton("trash", `Delete ${name}`, () => this.drop(id, name), { "data-kind": "drop" }),
    );
  }

  /** Put a field in the place of a title. Enter and leaving it keep the name, Escape does not. */
  rename(id, title) {
    const field = h("input", { "aria-label": "Name of the conversation", maxlength: 200 });
    field.value = title;
    const done = (keep) => {
      if (!this.renaming) return;
      this.renaming = false;
      const name = field.value.trim();
      if (keep && name && name !== title) this.does.renamed(id, name);
      this.show();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault();
      event.stopPropagation();
      done(event.key === "Enter");
      this.button(id, "rename")?.focus();
    });
    field.addEventListener("blur", () => done(true));
    this.renaming = true;
    this.button(id, "pick").closest("li").replaceChildren(field);
    field.focus();
    field.select();
  }

  drop(id, name) {
    const chat = this.does.dropped(id) ?? loadChat(id);
    removeChat(id);
    this.show();
    notify(`Deleted “${name.length > 30 ? `${name.slice(0, 30)}…` : name}”`, "Undo", () => {
      saveChat(chat);
      this.does.restored(chat);
    });
  }

  importFiles() {
    pickFiles(".json,application/json", async (files) => {
      let count = 0;
      for (const file of files) {
        try {
          for (const chat of readChats(await file.text())) {
            saveChat(chat);
            count += 1;
          }
        } catch (error) {
          this.show();
          return notify(`${file.name} cannot be imported: ${error.message}`);
        }
      }
      this.show();
      notify(`Imported ${count} ${count === 1 ? "conversation" : "conversations"}`);
    });
  }
}
