// Answers lines {"prompts": [[token, ...], ...], "tokens": n} on standard input with the seconds that llama.cpp takes for n tokens after
// each prompt, all at once. Arguments: the folder of node_modules, the file, threads.
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads] = process.argv.slice(2);
const entry = path.join(folder, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry).href);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error"});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const context = await model.createContext({
    sequences: 8, contextSize: 8192, batchSize: 512, threads: {ideal: Number(threads), min: Number(threads)},
});
const sequences = Array.from({length: 8}, () => context.getSequence());

async function answer(sequence, prompt, tokens) {
    await sequence.clearHistory();
    let left = tokens;
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) if (--left <= 0) break;
}

for await (const line of readline.createInterface({input: process.stdin})) {
    const {prompts, tokens} = JSON.parse(line), start = performance.now();
    await Promise.all(prompts.map((prompt, i) => answer(sequences[i], prompt, tokens)));
    console.log((performance.now() - start) / 1000);
}
process.exit(0);
