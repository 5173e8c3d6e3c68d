// Apply the chosen theme before anything is painted; without a choice, that of the system.
{
  const chosen = localStorage.getItem("pypto.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
