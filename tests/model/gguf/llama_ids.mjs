// Answers a line {"file": path, "texts": [...]} on standard input with the token ids that llama.cpp makes of each text.
// Argument: the folder of node_modules.
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const entry = path.join(process.argv[2], "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});

for await (const line of readline.createInterface({input: process.stdin})) {
    const {file, texts} = JSON.parse(line);
    const model = await llama.loadModel({modelPath: file, gpuLayers: 0, vocabOnly: true});
    const ids = texts.map((text) => model.tokenize(text, true));
    await new Promise((written) => process.stdout.write(JSON.stringify(ids) + "\n", written));
    await model.dispose();
}
process.exit(0);
