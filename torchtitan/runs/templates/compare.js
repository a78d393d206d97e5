document.querySelectorAll('.entry').forEach(entry => entry.onclick = () => {
  const shown = entry.getAttribute('aria-pressed') !== 'true';
  entry.setAttribute('aria-pressed', shown);
  document.body.classList.toggle('hide' + entry.dataset.group, !shown);
});
const slider = document.getElementById('sample-step');
if (slider) slider.oninput = () => {
  const frames = [...document.querySelectorAll('.frame')];
  frames.forEach((frame, number) => frame.hidden = number !== +slider.value);
  slider.nextElementSibling.value = (+frames[slider.value].dataset.step).toLocaleString('en');
};
const kept = sessionStorage.getItem(location.pathname), bySteps = document.getElementById('by-steps');
sessionStorage.removeItem(location.pathname);
if (kept) {
  const [height, steps] = JSON.parse(kept);
  bySteps.checked = steps;
  addEventListener('load', () => scrollTo(0, height));
}
if (reloadSeconds) setTimeout(() => {
  sessionStorage.setItem(location.pathname, JSON.stringify([scrollY, bySteps.checked]));
  location.reload();
}, 1000 * reloadSeconds);
