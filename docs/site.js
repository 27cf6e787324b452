// Browsers load no index for the search from the disk.
if (location.protocol === "file:") document.documentElement.classList.add("from-disk");
