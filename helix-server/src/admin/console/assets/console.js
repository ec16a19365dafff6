// Script of the console. Every page works without it: it updates pages in place, adds records to a
// live tail, and has keys for the navigation. Texts of others only become text, never markup.

/** Loads the page again and swaps its content, unless the reader is in the middle of something. */
function keepFresh(main) {
  const seconds = Number(main.dataset.refresh);
  if (!seconds) return;
  const isBusy = () => {
    const active = document.activeElement;
    const selection = String(window.getSelection() ?? "");
    const inMain = active && active !== document.body && main.contains(active);
    return document.hidden || inMain || selection !== "" || main.querySelector("details[open]");
  };
  let failures = 0;
  setInterval(async () => {
    if (isBusy() || failures > 60) return;
    try {
      const url = new URL(location.href);
      url.searchParams.delete("done");
      const response = await fetch(url, { signal: AbortSignal.timeout(10_000) });
      if (!response.ok) throw new Error(String(response.status));
      const loaded = new DOMParser().parseFromString(await response.text(), "text/html");
      const next = loaded.getElementById("main");
      if (!next || isBusy()) return;
      failures = 0;
      const scrolled = [...main.querySelectorAll(".scroll")].map((it) => it.scrollLeft);
      main.replaceChildren(...next.childNodes);
      main.querySelectorAll(".scroll").forEach((it, index) => { it.scrollLeft = scrolled[index] ?? 0; });
    } catch {
      failures += 1;
    }
  }, seconds * 1000);
}

/** Returns an element with this class and text. */
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Returns a record of an event as the server would have rendered it. */
function recordElement(record) {
  const article = element("article", "record new");
  const header = element("header");
  header.append(element("span", "offset", record.offset), " ", element("time", "", record.time));
  if (record.key !== null) {
    const key = element("span", "key", "key ");
    key.append(element("code", "", record.key));
    header.append(" ", key);
  }
  article.append(header);
  if (record.value === null) {
    article.append(element("p", "dim", "No value: the record deletes its key."));
  } else {
    article.append(element("pre", "value", record.value));
    const cut = record.cut ? " · not all is shown" : "";
    article.append(element("p", "dim meta", record.kind + cut));
  }
  return article;
}

/** Adds new records at the top of a live tail, and keeps the newest. */
function follow(list) {
  const RECORDS_MAX = 200;
  const state = document.querySelector("[data-tail-state]");
  const pause = document.querySelector("[data-pause]");
  let isPaused = false;
  let waiting = [];
  let skipped = 0n;
  const show = () => {
    const rows = waiting.map(recordElement).reverse();
    waiting = [];
    list.prepend(...rows);
    while (list.children.length > RECORDS_MAX) list.lastElementChild.remove();
    const left = skipped > 0n ? ` ${skipped} records came too fast and are not shown.` : "";
    state.textContent = `Live.${left}`;
  };
  const events = new EventSource(list.dataset.tail);
  events.onopen = () => { state.textContent = "Live: new records appear here."; };
  events.onmessage = (event) => {
    const message = JSON.parse(event.data);
    skipped += BigInt(message.skipped);
    waiting.push(...message.records);
    const surplus = waiting.length - RECORDS_MAX;
    if (surplus > 0) waiting.splice(0, surplus);
    if (!isPaused) show();
    else state.textContent = `Paused; ${waiting.length} new records.`;
  };
  events.addEventListener("failure", (event) => {
    state.textContent = `The tail has ended: ${JSON.parse(event.data).message}`;
    events.close();
  });
  events.onerror = () => {
    state.textContent = events.readyState === EventSource.CLOSED
      ? "The tail is not connected; reload the page."
      : "Connecting again…";
  };
  pause.hidden = false;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.textContent = isPaused ? "Continue" : "Pause";
    if (!isPaused) show();
  });
  addEventListener("pagehide", () => events.close());
}

/** Keys: / for the search, g and a letter for a page, n and p for the next and previous page. */
function useKeys() {
  const pages = {
    c: "/console/", t: "/console/topics", g: "/console/groups", s: "/console/slow", a: "/console/access",
  };
  let isGo = false;
  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName ?? "");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const link = (rel) => document.querySelector(`a[rel="${rel}"]`);
    if (isGo && pages[event.key]) {
      location.assign(pages[event.key]);
    } else if (event.key === "/") {
      const search = document.querySelector("main form.search input");
      if (search) {
        event.preventDefault();
        search.focus();
        search.select?.();
      }
    } else if (event.key === "n") {
      link("next")?.click();
    } else if (event.key === "p") {
      link("prev")?.click();
    }
    isGo = event.key === "g" && !isGo;
  });
  document.querySelectorAll(".keys").forEach((it) => { it.hidden = false; });
}

const main = document.getElementById("main");
if (main) keepFresh(main);
document.querySelectorAll("[data-tail]").forEach(follow);
useKeys();
