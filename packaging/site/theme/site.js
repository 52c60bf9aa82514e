// Search, the theme, the menu on small screens, and the old anchors of operations.html. Without it every page can be read all the same.
"use strict"

const MOST = 20
const base = document.body.dataset.base
const query = document.getElementById("query")
const results = document.getElementById("results")

// --- search: all words have to be in a section, as beginnings of words or inside names ---------------

const documents = (window.documents || []).map((one) => ({
  ...one, page: one.location.split("#")[0], low: one.text.toLowerCase(), lowTitle: one.title.toLowerCase(),
}))
const pageTitles = new Map(documents.filter((one) => !one.location.includes("#")).map((one) => [one.page, one.title]))

function score(one, words) {
  let sum = 0
  for (const word of words) {
    const inTitle = one.lowTitle.includes(word)
    const times = Math.min(one.low.split(word).length - 1, 5)
    if (!inTitle && !times) return 0
    sum += (inTitle ? 20 : 0) + (one.lowTitle === word ? 40 : 0) + times
  }
  if (one.page.startsWith("decisions/") || one.page === "changelog.html") sum /= 3 // how it came about
  return sum
}

// The text as a node, with the words marked.
function marked(text, words) {
  const node = document.createElement("span")
  const pattern = new RegExp(words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|"), "gi")
  let end = 0
  for (const found of text.matchAll(pattern)) {
    node.append(text.slice(end, found.index))
    node.append(Object.assign(document.createElement("mark"), { textContent: found[0] }))
    end = found.index + found[0].length
  }
  node.append(text.slice(end))
  return node
}

function excerpt(one, words) {
  const first = Math.max(0, Math.min(...words.map((word) => one.low.indexOf(word)).filter((at) => at >= 0)) - 60)
  const from = Number.isFinite(first) ? first : 0
  return marked((from ? "…" : "") + one.text.slice(from, from + 180).replace(/\s+/g, " ") + "…", words)
}

function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter((word) => word.length > 1)
  results.replaceChildren()
  results.hidden = !words.length
  if (!words.length) return
  const scored = documents.map((one) => [score(one, words), one]).filter(([sum]) => sum)
  // A page has the text of its sections, too: it is shown if its title has a word, or no section has all.
  const inSections = new Set(scored.filter(([, one]) => one.location.includes("#")).map(([, one]) => one.page))
  const found = scored.filter(([, one]) => one.location.includes("#") || !inSections.has(one.page)
    || words.some((word) => one.lowTitle.includes(word))).sort((a, b) => b[0] - a[0])
  for (const [, one] of found.slice(0, MOST)) {
    const link = Object.assign(document.createElement("a"), { href: `${base}/${one.location}` })
    const page = pageTitles.get(one.page)
    const title = Object.assign(document.createElement("strong"), { textContent: one.title })
    link.append(title, page && page !== one.title ? ` · ${page}` : "", excerpt(one, words))
    results.append(link)
  }
  const told = found.length > MOST ? `${found.length} sections; the first ${MOST} are shown.` : found.length ? "" : "No section has all of these words."
  if (told) results.append(Object.assign(document.createElement("p"), { textContent: told }))
}

query.addEventListener("input", search)
query.addEventListener("focus", search)
query.value = new URLSearchParams(location.search).get("q") || ""
search()
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== query) {
    event.preventDefault()
    query.focus()
  } else if (event.key === "Escape") {
    results.hidden = true
    document.activeElement.blur()
  } else if (!results.hidden && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    event.preventDefault()
    const links = [query, ...results.querySelectorAll("a")]
    const at = links.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1)
    links[(at + links.length) % links.length].focus()
  } else if (event.key === "Enter" && document.activeElement === query) {
    results.querySelector("a")?.click()
  }
})
document.addEventListener("click", (event) => {
  if (!results.contains(event.target) && event.target !== query) results.hidden = true
})

// --- the rest ----------------------------------------------------------------------------------------

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
  localStorage.setItem("theme", document.documentElement.dataset.theme = dark ? "light" : "dark")
})

const menu = document.getElementById("menu")
menu.addEventListener("click", () => {
  menu.setAttribute("aria-expanded", document.getElementById("pages").classList.toggle("open"))
})
// What is wider than the page is scrolled by the keyboard, too.
for (const one of document.querySelectorAll("main pre, main table, aside")) {
  if (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight) one.tabIndex = 0
}
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" })

function followMoved() {
  const anchor = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)))
  if (anchor && anchor.classList.contains("moved")) location.replace(anchor.nextElementSibling.href)
}
window.addEventListener("hashchange", followMoved)
followMoved()
