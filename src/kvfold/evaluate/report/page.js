// The page is whole without this script; it adds figures under the pointer and methods brought forward.
(() => {
  const tip = document.getElementById("tip");
  let pinned = null;

  const light = (method) => {
    document.body.classList.toggle("lit", method !== null);
    for (const part of document.querySelectorAll("[data-m]")) part.classList.toggle("on", part.dataset.m === method);
    for (const button of document.querySelectorAll(".legend button"))
      button.setAttribute("aria-pressed", String(pinned !== null && button.parentElement.dataset.m === pinned));
  };
  const show = (mark) => {
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const at = mark.getBoundingClientRect(), box = tip.getBoundingClientRect();
    const x = at.left + at.width / 2 - box.width / 2;
    tip.style.left = Math.max(6, Math.min(x, document.documentElement.clientWidth - box.width - 6)) + "px";
    tip.style.top = (at.top - box.height - 8 > 0 ? at.top - box.height - 8 : at.bottom + 8) + "px";
  };
  document.addEventListener("pointerover", (event) => {
    const mark = event.target.closest("[data-tip]");
    if (mark) show(mark); else tip.hidden = true;
    const part = event.target.closest(".line, .name, .legend li");
    if (pinned === null) light(part ? part.dataset.m : null);
  });
  document.addEventListener("click", (event) => {
    const part = event.target.closest(".line, .name, .legend li");
    if (!part && pinned === null) return;
    pinned = part && part.dataset.m !== pinned ? part.dataset.m : null;
    light(pinned);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { pinned = null; tip.hidden = true; light(null); }
  });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  // What is folded away is printed too, and folded again afterwards.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const part of closed) part.open = true;
  });
  addEventListener("afterprint", () => { for (const part of closed) part.open = false; });
})();
