"use strict";
// The page without scripts is complete: each video plays with the browser's own controls. This file replaces these by
// one player: the video holds every pane, so all of them show the same frame, and is drawn to one canvas a pane.

(() => {
  const root = document.documentElement;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  // --- theme ---------------------------------------------------------------------------------------------------------
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  let chosen = null;
  try { chosen = localStorage.getItem("turbo_rcm_patch.theme"); } catch { /* a page from a disk may have no storage */ }
  const paint = () => {
    const theme = chosen ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", theme === "dark" ? "Use the light theme" : "Use the dark theme");
  };
  dark.addEventListener("change", paint);
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("turbo_rcm_patch.theme", chosen); } catch { /* as above */ }
    paint();
  });
  button.hidden = false;
  paint();

  // --- player --------------------------------------------------------------------------------------------------------
  const template = document.getElementById("player");
  const onScreen = new IntersectionObserver(
    (entries) => entries.forEach((entry) => entry.target.player.shown(entry.isIntersecting)),
    { threshold: 0.2 },
  );

  class Player {
    constructor(figure) {
      this.figure = figure;
      this.given = JSON.parse(figure.dataset.player);
      this.video = figure.querySelector("video");
      this.frame = 0;
      this.wanted = null; // the frame to go to when the present seek has ended
      this.stopped = still; // by the reader; else it plays while it is on the screen
      this.view = "side";
      this.differences = { side: true, slider: false };
      this.gain = this.given.gain;
      this.zoom = false; // A quarter of each pane's width and height fills it, around this.spot.
      this.spot = [0.5, 0.5];
      this.video.after(template.content.cloneNode(true));
      this.parts = Object.fromEntries([...figure.querySelectorAll("[data-part]")].map((e) => [e.dataset.part, e]));
      this.video.hidden = true;
      this.video.controls = false;
      this.runs = ["control", "patched"].filter((run) => run in this.given); // a control may be missing
      figure.classList.toggle("two", this.runs.length < 2);
      figure.classList.toggle("tall", this.given.width < 1.3 * this.given.height);
      figure.style.setProperty("--stage", `${Math.min(1120, (560 * this.given.width) / this.given.height)}px`);
      this.build();
      this.listen();
      this.show();
      figure.player = this;
      onScreen.observe(figure);
    }

    build() {
      const { panes, gains, gain, frames } = this.given;
      this.canvases = {};
      for (const [name, pane] of Object.entries(panes)) {
        const cell = document.createElement("div");
        cell.className = "pane";
        cell.dataset.pane = name;
        const title = document.createElement("h4");
        title.append(pane.label, document.createElement("span"));
        cell.append(title, this.canvas(name, pane.alt));
        this.parts.grid.insertBefore(cell, this.parts.note);
        for (const end of ["left", "right"]) this.parts[end].add(new Option(pane.label, name));
      }
      this.parts.left.value = "baseline";
      this.parts.right.value = "patched";
      this.ends = ["left", "right"].map((end) => this.canvas(end, ""));
      this.parts.wipe.prepend(...this.ends);
      for (const one of gains) this.parts.gain.add(new Option(`× ${one}`, one, false, one === gain));
      this.parts.time.max = frames - 1;
      this.parts.judged.textContent = panes.patched.label;
      this.plot();
    }

    canvas(name, alt) {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [this.given.width, this.given.height];
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", alt);
      this.canvases[name] = canvas;
      return canvas;
    }

    plot() {
      const { plot, frames } = this.given;
      const svg = this.parts.curves;
      const last = Math.max(1, frames - 1);
      this.height = (value) => (typeof value !== "number" ? null : (100 * (plot.top - value)) / (plot.top - plot.bottom));
      svg.setAttribute("viewBox", `0 0 ${last} 100`);
      const draw = (className, d) => {
        const path = document.createElementNS("http:" + "//www.w3.org/2000/svg", "path");
        path.setAttribute("class", className);
        path.setAttribute("d", d);
        svg.append(path);
      };
      for (const tick of plot.ticks) {
        draw("g", `M0 ${this.height(tick)}H${last}`);
        const label = document.createElement("em");
        label.style.top = `${this.height(tick)}%`;
        label.textContent = `${tick} dB`;
        this.parts.plot.append(label);
      }
      for (const run of this.runs) {
        let pen = "M";
        const d = this.given[run].map((value, i) => {
          const point = typeof value !== "number" ? "" : `${pen}${i} ${this.height(value).toFixed(2)}`;
          pen = typeof value !== "number" ? "M" : "L";
          return point;
        });
        draw(run[0], d.join(""));
      }
      svg.setAttribute("aria-label", plot.alt);
    }

    listen() {
      const { parts, video } = this;
      const click = (part, act) => parts[part].addEventListener("click", act);
      click("play", () => this.toggle());
      click("back", () => this.step(-1));
      click("next", () => this.step(1));
      click("side", () => this.set("view", "side"));
      click("slider", () => this.set("view", "slider"));
      click("difference", () => this.differ());
      click("blink", () => this.blink());
      click("worst", () => this.worst());
      click("zoom", () => this.set("zoom", !this.zoom));
      for (const part of ["grid", "wipe"]) parts[part].addEventListener("pointermove", (event) => {
        const box = (event.target.closest("canvas") ?? parts.wipe).getBoundingClientRect();
        if (!this.zoom || !box.width) return;
        const inside = (share) => Math.min(1, Math.max(0, share));
        this.spot = [inside((event.clientX - box.left) / box.width), inside((event.clientY - box.top) / box.height)];
        this.draw();
      });
      parts.gain.addEventListener("change", () => this.set("gain", Number(parts.gain.value)));
      parts.speed.addEventListener("change", () => { video.playbackRate = Number(parts.speed.value); });
      parts.time.addEventListener("input", () => { this.pause(); this.seek(Number(parts.time.value)); });
      parts.split.addEventListener("input", () => this.show());
      for (const end of ["left", "right"]) parts[end].addEventListener("change", () => this.show());

      // Hovering over the plot seeks; leaving it goes on where it was.
      let playing = false;
      const hover = (event) => {
        const box = parts.plot.getBoundingClientRect();
        this.seek(Math.round(((event.clientX - box.left) / box.width) * (this.given.frames - 1)));
      };
      parts.plot.addEventListener("pointerenter", () => { playing = !video.paused; video.pause(); });
      parts.plot.addEventListener("pointermove", hover);
      parts.plot.addEventListener("pointerdown", hover);
      parts.plot.addEventListener("pointerleave", () => { if (playing && !this.stopped) this.play(); playing = false; });

      for (const event of ["play", "pause"]) video.addEventListener(event, () => this.show());
      video.addEventListener("loadeddata", () => this.draw());
      video.addEventListener("seeked", () => {
        if (video.seeking) return; // That of an earlier seek; the event of the present one follows.
        const next = this.wanted;
        this.wanted = null;
        if (next !== null && next !== this.sought) this.seek(next);
        else {
          this.draw();
          this.figure.dataset.shown = this.sought;
        }
      });
      const tick = (_, shown) => {
        if (!video.paused) this.at(Math.round((shown?.mediaTime ?? video.currentTime) * this.given.fps));
        this.draw();
        this.wait(tick);
      };
      this.wait(tick);
      this.figure.addEventListener("keydown", (event) => this.key(event));
    }

    wait(tick) {
      if (this.video.requestVideoFrameCallback) this.video.requestVideoFrameCallback(tick);
      else requestAnimationFrame((now) => tick(now, null));
    }

    key(event) {
      const { target, key } = event;
      if (event.ctrlKey || event.metaKey || event.altKey || target.tagName === "SELECT") return;
      const range = target === this.parts.split;
      const acts = {
        " ": target.tagName === "BUTTON" ? null : () => this.toggle(),
        ArrowLeft: range ? null : () => this.step(event.shiftKey ? -8 : -1),
        ArrowRight: range ? null : () => this.step(event.shiftKey ? 8 : 1),
        Home: range ? null : () => this.step(-Infinity),
        End: range ? null : () => this.step(Infinity),
        d: () => this.differ(),
        s: () => this.set("view", this.view === "side" ? "slider" : "side"),
        b: () => this.blink(),
        w: () => this.worst(),
        z: () => this.set("zoom", !this.zoom),
        "+": () => this.louder(1),
        "-": () => this.louder(-1),
      };
      const act = acts[key.length === 1 ? key.toLowerCase() : key];
      if (!act) return;
      event.preventDefault();
      act();
    }

    // Each view has its own switch: side by side the differences stand below, in the slider in the place of the right half.
    get difference() { return this.differences[this.view]; }
    differ() { this.differences[this.view] = !this.difference; this.show(); }

    // The slider at its end shows one of its two halves alone.
    blink() {
      const { split } = this.parts;
      const right = this.view === "slider" && split.value === "100";
      this.view = "slider";
      this.differences.slider = false;
      split.value = right ? 0 : 100;
      this.show();
    }

    worst() {
      const values = this.given.patched.map((v) => (typeof v === "number" ? v : v === null ? Infinity : -Infinity));
      this.step(values.indexOf(Math.min(...values)) - this.frame);
    }

    louder(by) {
      const { gains } = this.given;
      const place = gains.indexOf(this.gain) + by;
      this.set("gain", gains[Math.min(gains.length - 1, Math.max(0, place))]);
      this.parts.gain.value = this.gain;
    }

    toggle() { if (this.video.paused) { this.stopped = false; this.play(); } else this.pause(); }
    play() {
      this.video.loop = true;
      this.video.play().catch(() => this.show());
    }
    pause() { this.stopped = true; this.video.pause(); }
    shown(visible) {
      this.visible = visible;
      if (!visible) this.video.pause();
      else if (!this.stopped) this.play();
    }
    step(by) { this.pause(); this.seek(this.frame + by); }

    seek(frame) {
      frame = Math.max(0, Math.min(this.given.frames - 1, frame));
      this.at(frame);
      if (this.video.seeking) { this.wanted = frame; return; }
      this.sought = frame;
      this.wanted = null; // An earlier seek may have ended without its event having come yet.
      this.video.loop = false; // Else Chromium may take the last frame, paused, for the end, and go to the first one.
      this.video.currentTime = (frame + 0.5) / this.given.fps; // the middle of a frame, whatever rounds
    }

    set(name, value) { this[name] = value; this.show(); }

    at(frame) {
      frame = Math.max(0, Math.min(this.given.frames - 1, frame));
      this.frame = frame;
      const { parts, given } = this;
      this.figure.dataset.frame = frame;
      const share = `${(100 * frame) / Math.max(1, given.frames - 1)}%`;
      parts.now.style.left = share;
      const words = [`frame ${frame + 1} of ${given.frames}`];
      parts["at-control"].hidden = !this.runs.includes("control");
      for (const run of [...this.runs].reverse()) {
        const value = given[run][frame], dot = parts[`at-${run}`];
        dot.hidden = typeof value !== "number"; // null where the frames are equal, else a text
        if (!dot.hidden) [dot.style.left, dot.style.top] = [share, `${this.height(value)}%`];
        words.push(`${given.panes[run].label.toLowerCase()} ${value === null ? "equal" : dot.hidden ? "not a number" : `${value.toFixed(1)} dB`}`);
      }
      parts.time.value = frame;
      parts.time.setAttribute("aria-valuetext", words.join(", "));
      const first = document.createElement("b");
      first.textContent = words[0];
      parts.words.replaceChildren(first, ` · ${words.slice(1).join(" · ")}`);
    }

    // What is drawn in the slider's two halves: with the difference on, the right one is that of its run.
    end(which) {
      const name = this.parts[which].value;
      const other = `${name} difference`;
      return which === "right" && this.difference && other in this.given.panes ? other : name;
    }

    show() {
      const { parts, figure, video, given, canvases } = this;
      const slider = this.view === "slider";
      Object.assign(figure.dataset, { view: this.view, playing: !video.paused, difference: this.difference });
      figure.classList.toggle("plain", !this.difference);
      parts.grid.hidden = slider;
      parts.stage.hidden = !slider;
      parts.side.setAttribute("aria-pressed", !slider);
      parts.slider.setAttribute("aria-pressed", slider);
      parts.difference.setAttribute("aria-pressed", this.difference);
      parts.zoom.setAttribute("aria-pressed", this.zoom);
      const end = slider ? { 0: "right", 100: "left" }[parts.split.value] : undefined;
      parts.blink.textContent = end ? `A/B: ${given.panes[this.end(end)].label}` : "A/B";
      parts.play.textContent = video.paused ? "▶" : "❚❚";
      parts.play.setAttribute("aria-label", video.paused ? "Play" : "Pause");
      parts.wipe.style.setProperty("--at", `${parts.split.value}%`);
      parts.split.setAttribute("aria-valuetext", `${parts.split.value} % from the left`);
      const brightness = (name) => (given.panes[name].difference ? `brightness(${this.gain / given.gain})` : "");
      for (const [name, pane] of Object.entries(given.panes)) {
        const cell = canvases[name].parentElement;
        canvases[name].style.filter = brightness(name);
        cell.hidden = pane.difference && !this.difference;
        cell.querySelector("span").textContent = pane.difference ? `× ${this.gain}` : "";
      }
      this.halves = ["left", "right"].map((which) => this.end(which));
      parts.louder.hidden = slider ? !this.halves.some((name) => given.panes[name].difference) : !this.difference;
      this.halves.forEach((name, i) => {
        this.ends[i].style.filter = brightness(name);
        this.ends[i].setAttribute("aria-label", given.panes[name].alt);
      });
      this.at(this.frame);
      this.draw();
    }

    draw() {
      const { video, given, canvases } = this;
      if (video.readyState < 2) return;
      const put = (canvas, name) => {
        const { width, height } = given;
        const { column, row } = given.panes[name];
        const pen = canvas.getContext("2d");
        pen.imageSmoothingEnabled = !this.zoom;
        const [w, h] = this.zoom ? [width / 4, height / 4] : [width, height];
        const x = column * width + this.spot[0] * (width - w), y = row * height + this.spot[1] * (height - h);
        pen.drawImage(video, x, y, w, h, 0, 0, width, height);
      };
      if (this.view === "slider") this.halves.forEach((name, i) => put(this.ends[i], name));
      else for (const name of Object.keys(given.panes)) put(canvases[name], name);
    }
  }

  for (const figure of document.querySelectorAll("figure[data-player]")) new Player(figure);
  document.getElementById("keys").hidden = false;
})();
