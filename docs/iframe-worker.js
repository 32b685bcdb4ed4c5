// A page that is opened from the disk may not start a worker, in which the theme searches. Its script
// runs in a hidden frame instead. The theme's plugin `offline` knows this file by its name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script>postMessage = data => parent.postMessage(data, "*")</script>
        <script src="${url}"></script>`
      this.ready = new Promise(done => { this.frame.onload = done })
      addEventListener("message", event => {
        if (event.source === this.frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", {data: event.data}))
        }
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
