// Draw the charts. `ast` makes Vega interpret expressions, because the page's policy forbids eval.
const specs = JSON.parse(document.getElementById("specs").textContent);
for (const place of document.querySelectorAll("[data-chart]"))
  vegaEmbed(place, specs[place.dataset.chart], {
    actions: false, ast: true, renderer: "svg", defaultStyle: false, tooltip: {disableDefaultStyle: true},
  }).catch(error => { place.textContent = `The chart was not drawn: ${error.message}`; });

// Each copy button copies the code next to it. Without a clipboard, it selects the code.
for (const button of document.querySelectorAll(".copied button"))
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
  });
