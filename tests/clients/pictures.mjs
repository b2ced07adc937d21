// What the scripts with pictures send, and the answer that they expect to the first question: see pictures.py.
import { readFileSync } from "node:fs";

export const [, , baseURL, model, pictureURL, pictureFile, pdfFile, answer] = process.argv;
export const question = "What is in it?";
export const picture = readFileSync(pictureFile);
export const dataURL = `data:image/png;base64,${picture.toString("base64")}`;
export const pdf = readFileSync(pdfFile);
export const tokens = 8; // of each answer
export const tool = "take_photo";
