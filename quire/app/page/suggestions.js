// What an empty conversation offers. Each suggestion is something that the model can really answer.

import { byId, element, icon } from "./elements.js";

export const WEATHER_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
export const PERSON_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};

// The bundled model adds, recalls, extracts and calls tools; it knows nothing but Quire.
const BUNDLED = [
  { symbol: "plus", title: "Add two numbers", text: "What is 27 + 58?", note: "It reasons first. Unfold its steps." },
  {
    symbol: "question",
    title: "Ask about this server",
    text: "How do I start the server?",
    note: "It was trained on questions about Quire.",
  },
  {
    symbol: "code",
    title: "Get structured output",
    text: "Extract name, age and city as JSON: Anna is 31 years old and lives in Rome.",
    note: "A JSON schema constrains the answer.",
    settings: { schema: PERSON_SCHEMA },
  },
  {
    symbol: "tool",
    title: "Let it call a tool",
    text: "How is the weather in Oslo?",
    note: "You play the tool and send its result.",
    settings: { tools: [WEATHER_TOOL] },
  },
];
const GENERAL = [
  {
    symbol: "question",
    title: "Explain",
    text: "Explain in three sentences what a KV cache is.",
    note: "A short answer to a hard question.",
  },
  {
    symbol: "code",
    title: "Write code",
    text: "Write a Python function that merges two sorted lists, with a test.",
    note: "Code comes with buttons that copy and save it.",
  },
  {
    symbol: "menu",
    title: "Make a table",
    text: "Make a table of the planets of the solar system with their diameters.",
    note: "Markdown is shown as it is meant.",
  },
  {
    symbol: "tool",
    title: "Let it call a tool",
    text: "How is the weather in Oslo?",
    note: "You play the tool and send its result.",
    settings: { tools: [WEATHER_TOOL] },
  },
];
const PICTURE = { symbol: "camera", title: "Ask about a picture", note: "Choose one, drop it here, or paste it." };

function suggestionsFor(model) {
  const seesPictures = model?.reads.includes("image");
  if (model?.id.startsWith("quire-nano")) return seesPictures ? [PICTURE] : BUNDLED;
  return seesPictures ? [PICTURE, ...GENERAL.slice(0, 3)] : GENERAL;
}

// Shows suggestions for a model. `choose` gets the one that is clicked.
export function drawSuggestions(model, choose) {
  const offered = suggestionsFor(model);
  const cards = offered.map((suggestion) =>
    element(
      "button",
      { type: "button", class: "suggestion", onclick: () => choose(suggestion) },
      icon(suggestion.symbol),
      element(
        "span",
        {},
        element("b", {}, suggestion.title),
        suggestion.text && element("q", {}, suggestion.text),
        element("small", {}, suggestion.note),
      ),
    ),
  );
  byId("suggestions").replaceChildren(...(model ? cards : []));
  byId("empty-text").textContent = model
    ? `${model.id} answers from this server. Conversations stay in this browser.`
    : "Serve a model that generates text, for example with: quire serve MODEL";
}
