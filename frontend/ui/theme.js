// Light or dark: as the system, or as somebody chose. It runs before the page is drawn, so that nothing flashes.
"use strict";
{
  const NAMES = ["auto", "light", "dark"];
  const stored = () => {
    try {
      const name = localStorage.getItem("genset.theme");
      return NAMES.includes(name) ? name : "auto";
    } catch {
      return "auto";
    }
  };
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    for (const button of document.querySelectorAll("[data-theme-switch]")) {
      button.textContent = `Theme: ${name}`;
    }
  };
  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    apply(stored());
    for (const button of document.querySelectorAll("[data-theme-switch]")) {
      button.addEventListener("click", () => {
        const next = NAMES[(NAMES.indexOf(document.documentElement.dataset.theme) + 1) % NAMES.length];
        try {
          localStorage.setItem("genset.theme", next);
        } catch {
          // A browser that keeps nothing shows it until the page is left.
        }
        apply(next);
      });
    }
  });
}
