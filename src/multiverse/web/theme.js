// Before anything is drawn: the theme that the address names, or else what the system prefers.
(() => {
  const theme = new URLSearchParams(location.search).get("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
