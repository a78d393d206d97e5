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
