// Runs in the audio thread: collects samples into chunks of a twentieth of a second of 16-bit PCM.
class Chunker extends AudioWorkletProcessor {
  constructor() {
    super();
    this.chunk = new Int16Array(Math.round(sampleRate / 20));
    this.filled = 0;
  }

  process(inputs) {
    const samples = inputs[0][0];
    if (!samples) return true;
    for (const sample of samples) {
      this.chunk[this.filled++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
      if (this.filled === this.chunk.length) {
        this.port.postMessage(this.chunk.buffer, [this.chunk.buffer]);
        this.chunk = new Int16Array(this.filled);
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("chunker", Chunker);
