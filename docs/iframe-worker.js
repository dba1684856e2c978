/* Opened from the disk, a page may not start a Worker, in which the search runs. A hidden frame that
   loads the same script does as well: what it posts arrives here, and what is posted arrives there. */
class IFrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    const inside = frame.contentWindow
    const script = inside.document.createElement("script")
    script.src = url
    inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
    this.loaded = new Promise(done => script.addEventListener("load", done))
    this.inside = inside
    inside.document.body.append(script)
  }
  postMessage(data) {
    this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
  }
}
if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
}
