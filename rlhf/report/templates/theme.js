"use strict";
// Before the first paint, so that a page kept dark does not flash. Without a choice, the system's is followed.
try {
  const kept = localStorage.getItem("rlhf-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch (error) {
  // A file:// page may have no storage; the choice then lasts as long as the page.
}
