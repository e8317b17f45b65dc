// Light, dark or as the system has it; and an address without its token, which is in a cookie.

const THEMES = ["auto", "light", "dark"];
const KEY = "ravnest-theme";

function known() {
  const theme = localStorage.getItem(KEY);
  return THEMES.includes(theme) ? theme : "auto";
}

export function followTheme(button, redraw) {
  function choose(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    localStorage.setItem(KEY, theme);
    button.title = `Colours: ${theme}`;
    redraw();
  }
  choose(known());
  button.addEventListener("click", () => choose(THEMES[(THEMES.indexOf(known()) + 1) % THEMES.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

export function forgetToken() {
  if (new URLSearchParams(location.search).has("token")) {
    history.replaceState(null, "", `${location.pathname}${location.hash}`);
  }
}
