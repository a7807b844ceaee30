// An explorable without a kernel: each combination of its controls' values has a picture of its own.
for (const box of document.querySelectorAll(".explorable")) {
  const controls = [...box.querySelectorAll("input, select")], image = box.querySelector("img");
  const show = () => {
    for (const each of controls)
      if (each.nextElementSibling) each.nextElementSibling.value = JSON.parse(each.dataset.values)[each.value];
    image.src = box.dataset.frames + controls.map((each) => each.value).join("-") + ".png";
  };
  for (const each of controls) each.addEventListener("input", show);
}
