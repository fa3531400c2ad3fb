"use strict";
// One image at a time: shown from memory, sent to this machine, answered. Text only, never markup.
const zone = document.getElementById("zone");
const chooser = document.getElementById("file");
const preview = document.getElementById("preview");
const message = document.getElementById("message");
const table = document.getElementById("answer");
let asked = 0;

function say(text, bad) {
  message.textContent = text;
  message.className = bad ? "bad" : "";
}

function show(classes) {
  const rows = classes.map(({ label, probability }) => {
    const row = document.createElement("tr");
    const bar = document.createElement("progress");
    bar.max = 1;
    bar.value = probability;
    const share = `${(100 * probability).toFixed(1)} %`;
    bar.setAttribute("aria-label", `${label}: ${share}`);
    for (const content of [label, bar, share]) {
      const cell = document.createElement("td");
      cell.append(content);
      row.append(cell);
    }
    return row;
  });
  table.tBodies[0].replaceChildren(...rows);
  table.hidden = false;
}

async function classify(file) {
  const number = ++asked;
  table.hidden = true;
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.hidden = false;
  preview.onerror = () => { preview.hidden = true; };
  say(`${file.name} …`, false);
  try {
    const response = await fetch("/classify", { method: "POST", body: file });
    const found = await response.json();
    if (number !== asked) return; // another image was dropped meanwhile
    if (!response.ok) {
      say(`${found.what} ${found.fix}`, true);
      return;
    }
    say(`${file.name}: ${found.label}, ${(100 * found.probability).toFixed(1)} %`, false);
    show(found.classes);
  } catch (error) {
    if (number === asked) say("No answer: is sfumato serve still running?", true);
  }
}

// A file dropped beside the zone would otherwise replace the page.
for (const name of ["dragenter", "dragover", "drop"]) {
  document.addEventListener(name, (event) => event.preventDefault());
}
zone.addEventListener("dragover", () => zone.classList.add("over"));
zone.addEventListener("dragleave", () => zone.classList.remove("over"));
zone.addEventListener("drop", (event) => {
  zone.classList.remove("over");
  const files = event.dataTransfer.files;
  if (files.length) classify(files[0]);
});
chooser.addEventListener("change", () => {
  if (chooser.files.length) classify(chooser.files[0]);
  chooser.value = "";
});
