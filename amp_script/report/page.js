"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const operators = report.operators;
  const element = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // --- what is known of each operator --------------------------------------------------------

  const tone = (dtype) => {
    if (dtype === "unknown" || dtype === "bool") return dtype;
    if (/^(bfloat16|float(16|32|64))$/.test(dtype)) return dtype;
    if (dtype.startsWith("float8")) return "float8";
    return /^u?int/.test(dtype) ? "integer" : "other";
  };
  const casts = new Map(report.casts.map((cast) => [cast.operator, cast]));
  const origins = {
    activation: "an activation", constant: "a constant", input: "an input", weight: "a weight",
  };
  const takers = operators.map(() => []);
  operators.forEach((operator, index) => {
    for (const input of operator.inputs) takers[input].push(index);
  });
  const label = (name) => (name === null ? "submodule unknown" : name);
  const texts = operators.map((operator, index) => {
    const cast = casts.get(index);
    return [operator.kind, operator.dtype, label(operator.submodule), operator.source,
      operator.method, cast ? `cast ${cast.origin} ${cast.before} ${cast.after}` : ""]
      .join(" ").toLowerCase();
  });
  const shortKind = (kind) => kind.replace(/^aten::/, "");

  // --- the tree of submodules ----------------------------------------------------------------

  const newGroup = (name, path) => ({ name, path, parts: [], groups: new Map(), all: [] });
  const methods = [...new Set(operators.map((operator) => operator.method))];
  const roots = [];
  const inside = (group, key, name, path) => {
    if (!group.groups.has(key)) {
      const made = newGroup(name, path);
      group.groups.set(key, made);
      group.parts.push(made);
    }
    return group.groups.get(key);
  };
  const someKnown = operators.some((operator) => operator.submodule !== null);
  const byMethod = new Map(methods.map((method) => {
    const root = newGroup(methods.length > 1 ? `${report.name}.${method}` : report.name, "");
    roots.push(root);
    return [method, root];
  }));
  operators.forEach((operator, index) => {
    let group = byMethod.get(operator.method);
    group.all.push(index);
    if (operator.submodule === null) {
      if (someKnown) {
        group = inside(group, "?", "submodule unknown", null);
        group.all.push(index);
      }
    } else if (operator.submodule) {
      let path = "";
      for (const part of operator.submodule.split(".")) {
        path = path ? `${path}.${part}` : part;
        group = inside(group, `.${part}`, part, path);
        group.all.push(index);
      }
    }
    group.parts.push(index);
  });

  const joined = (group) => { // a submodule that only holds another one is shown with it
    group.parts.forEach((part, place) => {
      if (typeof part !== "number") group.parts[place] = joined(part);
    });
    const only = group.parts[0];
    if (group.path && group.parts.length === 1 && typeof only !== "number") {
      only.name = `${group.name}.${only.name}`;
      return only;
    }
    return group;
  };
  roots.forEach(joined);

  // --- filters -------------------------------------------------------------------------------

  const search = element("search");
  const shownDtypes = new Set();
  let words = [];
  let hits = null; // null: everything
  const matches = (index) =>
    (shownDtypes.size === 0 || shownDtypes.has(operators[index].dtype)) &&
    words.every((word) => texts[index].includes(word));
  const isHit = (index) => hits === null || hits.has(index);

  // --- drawing -------------------------------------------------------------------------------

  const share = (indices) => {
    const counts = new Map();
    for (const index of indices) {
      const dtype = operators[index].dtype;
      counts.set(dtype, (counts.get(dtype) || 0) + 1);
    }
    return [...counts].sort((a, b) => b[1] - a[1]);
  };
  const bar = (indices) => {
    const drawn = make("span", "bar");
    const counts = share(indices);
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", counts.map(([dtype, n]) => `${n} ${dtype}`).join(", "));
    drawn.title = drawn.getAttribute("aria-label");
    for (const [dtype, count] of counts) {
      const part = make("i", tone(dtype));
      part.style.flexGrow = count;
      drawn.append(part);
    }
    return drawn;
  };
  const badge = (dtype) => make("span", `badge ${tone(dtype)}`, dtype);
  const link = (index) => {
    const made = make("a", "", `#${index} ${shortKind(operators[index].kind)}`);
    made.href = `#op-${index}`;
    return made;
  };
  const list = (row, title, indices) => {
    if (indices.length === 0) return;
    row.append(` ${title} `);
    indices.slice(0, 8).forEach((index, place) => row.append(place ? ", " : "", link(index)));
    if (indices.length > 8) row.append(` and ${indices.length - 8} more`);
  };
  const drawOperator = (index) => {
    const operator = operators[index];
    const row = make("div", "op");
    row.id = `op-${index}`;
    const number = make("a", "number mono", `#${index}`);
    number.href = `#op-${index}`;
    const kind = make("span", "kind mono", shortKind(operator.kind));
    kind.title = operator.kind;
    const dtype = make("span");
    dtype.append(badge(operator.dtype));
    const rest = make("span", "rest");
    const cast = casts.get(index);
    if (cast) {
      const how = cast.conditional ? " if it must" : "";
      rest.append(make("span", `cast ${tone(cast.after)}`,
        `casts ${origins[cast.origin]}: ${cast.before} → ${cast.after}${how}`));
    } else if (operator.operands.length) {
      rest.append(`of ${operator.operands.join(", ")}`);
    }
    list(rest, "←", operator.inputs);
    list(rest, "→", takers[index]);
    const place = /^(.*?):(\d+)(?:: (.*))?$/s.exec(operator.source);
    if (place) {
      const source = make("span", "source mono", `${place[1].split(/[/\\]/).pop()}:${place[2]}`);
      if (place[3]) source.append("  ", make("span", "code", place[3]));
      source.title = operator.source;
      rest.append(source);
    }
    row.append(number, kind, dtype, rest);
    return row;
  };
  const groups = new WeakMap(); // by the element that shows them
  const drawGroup = (group, depth) => {
    const found = hits === null ? group.all : group.all.filter(isHit);
    if (found.length === 0) return null;
    const details = make("details", "module");
    const summary = make("summary");
    const name = make("span", "name mono", group.name);
    if (group.path) name.title = group.path;
    const count = found.length === group.all.length
      ? `${found.length} operator${found.length === 1 ? "" : "s"}`
      : `${found.length} of ${group.all.length}`;
    summary.append(name, bar(found), make("span", "count", count));
    details.append(summary);
    groups.set(details, group);
    details.fill = () => {
      if (details.filled) return;
      details.filled = true;
      for (const part of group.parts) {
        if (typeof part === "number") {
          if (isHit(part)) details.append(drawOperator(part));
        } else {
          const drawn = drawGroup(part, depth + 1);
          if (drawn) details.append(drawn);
        }
      }
    };
    details.addEventListener("toggle", () => { if (details.open) details.fill(); });
    const few = operators.length <= 60;
    if (hits !== null || few || depth < (operators.length > 1500 ? 1 : 2)) {
      details.fill();
      details.open = true;
    }
    return details;
  };
  const drawStrip = () => {
    const strip = element("strip");
    strip.replaceChildren();
    strip.classList.toggle("dim", hits !== null);
    let start = 0;
    while (start < operators.length) {
      const { dtype, submodule } = operators[start];
      let end = start + 1;
      while (end < operators.length && operators[end].dtype === dtype &&
             operators[end].submodule === submodule && isHit(end) === isHit(start)) end += 1;
      const part = make("i", `${tone(dtype)}${isHit(start) ? " hit" : ""}`);
      part.style.flexGrow = end - start;
      part.style.flexBasis = 0;
      part.title = `${dtype}: ${label(submodule) || report.name}`;
      part.dataset.index = start;
      strip.append(part);
      start = end;
    }
  };
  const draw = () => {
    words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    hits = words.length || shownDtypes.size
      ? new Set(operators.map((_, index) => index).filter(matches)) : null;
    const tree = element("tree");
    const drawn = roots.map((root) => drawGroup(root, 0)).filter(Boolean);
    tree.replaceChildren(...drawn);
    if (drawn.length === 0) tree.append(make("p", "none", "No operator is like that."));
    const count = hits === null ? operators.length : hits.size;
    element("found").textContent = hits === null
      ? `${count} operators` : `${count} of ${operators.length} operators`;
    drawStrip();
  };

  // --- what a person does --------------------------------------------------------------------

  const mark = (index) => {
    for (const row of document.querySelectorAll(".chosen, .near")) {
      row.classList.remove("chosen", "near");
    }
    element(`op-${index}`).classList.add("chosen");
    for (const near of [...operators[index].inputs, ...takers[index]]) {
      const row = element(`op-${near}`);
      if (row) row.classList.add("near");
    }
  };
  const reveal = (index) => {
    if (!operators[index]) return;
    if (!isHit(index)) {
      search.value = "";
      shownDtypes.clear();
      drawLegend();
      draw();
    }
    let level = element("tree");
    while (level) {
      level = [...level.children].find((child) => groups.get(child)?.all.includes(index));
      if (level) {
        level.fill();
        level.open = true;
      }
    }
    mark(index);
    element(`op-${index}`).scrollIntoView({ block: "center" });
  };
  const drawLegend = () => {
    const legend = element("legend");
    legend.replaceChildren(...share(operators.keys()).map(([dtype, count]) => {
      const button = make("button", tone(dtype), `${dtype} ${count}`);
      button.type = "button";
      button.setAttribute("aria-pressed", shownDtypes.has(dtype));
      button.addEventListener("click", () => {
        if (!shownDtypes.delete(dtype)) shownDtypes.add(dtype);
        button.setAttribute("aria-pressed", shownDtypes.has(dtype));
        draw();
      });
      return button;
    }));
  };
  const setAll = (open) => {
    const pending = [...document.querySelectorAll("#tree details.module")];
    while (pending.length) {
      const details = pending.pop();
      if (open) details.fill();
      details.open = open;
      if (open) pending.push(...[...details.children].filter((child) => groups.has(child)));
    }
  };
  const decoded = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // a per cent sign that somebody typed
    }
  };
  const followHash = () => {
    const hash = location.hash.slice(1);
    if (hash.startsWith("q=")) {
      search.value = decoded(hash.slice(2));
      draw();
    } else if (/^op-\d+$/.test(hash)) {
      reveal(Number(hash.slice(3)));
    }
  };

  search.addEventListener("input", draw);
  element("open").addEventListener("click", () => setAll(true));
  element("close").addEventListener("click", () => setAll(false));
  element("strip").addEventListener("click", (event) => {
    const index = event.target.dataset.index;
    if (index !== undefined) location.hash = `op-${index}`;
  });
  document.addEventListener("click", (event) => {
    const row = event.target.closest(".op");
    if (row && !event.target.closest("a")) mark(Number(row.id.slice(3)));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search) {
      event.preventDefault();
      search.focus();
    }
  });
  window.addEventListener("hashchange", followHash);
  drawLegend();
  draw();
  followHash();
})();
