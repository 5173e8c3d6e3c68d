// Make elements of MathML.

const MATHML = "http://www.w3.org/1998/Math/MathML";

/** Make one: `m("mi", {mathvariant: "normal"}, "x")`. */
export const m = (name, attributes, ...children) => {
  const element = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
/** Parts beside each other, as one. */
export const row = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", {}, ...nodes));

/** An operator or a fence. */
export const operator = (sign, attributes = {}) => m("mo", attributes, sign);

/** An upright name, such as that of a function, with room after it. */
export function named(name, limits) {
  const made = m("mo", { class: "name", lspace: "0", rspace: "0.1667em", movablelimits: "true" }, name);
  if (limits) made.dataset.limits = "yes";
  return made;
}

/** Parts between two fences that grow with them; "" is none. */
export const between = (left, parts, right) => m("mrow", {}, ...[left && operator(left, { stretchy: "true", form: "prefix" }), ...parts, right && operator(right, { stretchy: "true", form: "postfix" })].filter(Boolean));
