// Sets the theme before the page is first drawn: the one chosen here, else the system's.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    let chosen = null;
    try { chosen = localStorage.getItem("shoal-theme"); } catch { /* no storage: the system's */ }
    document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
  };
  dark.addEventListener("change", show);
  addEventListener("storage", show);
  show();
})();
