// Making and updating elements. Text only ever enters the document as text: there is no way in here
// to turn a string into markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "title"]);

/** An element with properties and children. `class` and attributes as they are named in HTML, `style`
 *  an object, `data` an object; null and undefined children and attributes are left out. */
export function el(tag, properties = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Makes `old` look like `fresh`, keeping the elements that are there: focus, selection, scrolling and
 *  open details survive. Children are matched by `data-key` where they have one, else by position. */
export function morph(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (name !== "style" && name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  morphChildren(old, [...fresh.childNodes]);
}

export function morphChildren(parent, fresh) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  let at = parent.firstChild;
  for (const wanted of fresh) {
    const key = wanted.dataset?.key;
    const match = key ? keyed.get(key) : at && !at.dataset?.key ? at : null;
    if (match && match.nodeType === wanted.nodeType && match.nodeName === wanted.nodeName) {
      if (match !== at) parent.insertBefore(match, at);
      else at = at.nextSibling;
      if (match.nodeType === Node.TEXT_NODE) {
        if (match.data !== wanted.data) match.data = wanted.data;
      } else morph(match, wanted);
    } else parent.insertBefore(wanted, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** `text` of the element, written only when it changed: readers announce every write. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
