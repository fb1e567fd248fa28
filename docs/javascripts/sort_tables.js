// A click on a heading sorts the table by that column: by its first number, else by its text; a
// second click turns the order round.
function keyOf(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = text.match(/^-?\d[\d,]*\.?\d*/);
  return number ? parseFloat(number[0].replaceAll(",", "")) : text.toLowerCase();
}

function compare(one, other) {
  // What has no number yet comes last.
  if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
  return typeof one === "number" ? other - one : one.localeCompare(other);
}

document.addEventListener("click", (event) => {
  const head = event.target.closest("article th");
  if (!head) return;
  const body = head.closest("table").tBodies[0];
  const rows = [...body.rows].sort((a, b) => compare(keyOf(a, head.cellIndex), keyOf(b, head.cellIndex)));
  const turned = head.dataset.sorted === "down";
  head.dataset.sorted = turned ? "up" : "down";
  body.append(...(turned ? rows.reverse() : rows));
});
