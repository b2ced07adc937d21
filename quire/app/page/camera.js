// A dialog with the picture of the camera.

import { canvasBlob } from "./attachments.js";
import { byId, toast } from "./elements.js";

// Asks for a picture. Returns a file, or undefined if none is taken.
export async function takePicture() {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({
      video: { facingMode: "environment", width: { ideal: 1920 } },
    });
  } catch (error) {
    toast(`The camera could not be started: ${error.message}`);
    return undefined;
  }
  const dialog = byId("camera-dialog");
  const video = byId("camera-video");
  video.srcObject = stream;
  dialog.returnValue = "";
  dialog.showModal();
  try {
    await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
    return dialog.returnValue === "take" ? await pictureOf(video) : undefined;
  } finally {
    for (const track of stream.getTracks()) track.stop();
    video.srcObject = null;
  }
}

async function pictureOf(video) {
  if (video.videoWidth === 0) {
    toast("The camera has sent no picture yet.");
    return undefined;
  }
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new File([await canvasBlob(canvas)], "camera.jpg", { type: "image/jpeg" });
}
