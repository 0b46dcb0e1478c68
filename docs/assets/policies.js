// Filters the policy table by what is typed: every word must be in a row.

for (const block of document.querySelectorAll(".policies")) {
  const rows = [...block.querySelectorAll("tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const none = block.querySelector(".policies-none");
  block.querySelector(".policies-filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
      shown += row.hidden ? 0 : 1;
    });
    none.hidden = shown > 0;
  });
}
