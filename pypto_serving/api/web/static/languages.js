// Programming languages as the highlighter needs them: their words, comments and strings.

const words = (text) => new Set(text.split(" "));
const C_COMMENTS = { line: ["//"], block: ["/*", "*/"] };
const QUOTES = ['"', "'"];

const C = "auto break case const continue default do else enum extern for goto if inline register restrict return sizeof static struct switch typedef union volatile while void int char long short float double signed unsigned bool true false NULL size_t uint8_t uint16_t uint32_t uint64_t int8_t int16_t int32_t int64_t";
const CPP = `${C} alignas alignof and catch class concept consteval constexpr constinit co_await co_return co_yield decltype delete explicit export final friend mutable namespace new noexcept nullptr operator or not override private protected public requires static_assert static_cast dynamic_cast reinterpret_cast const_cast template this throw try typename using virtual`;
const JS = "async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof let new null of return set static super switch this throw true false try typeof undefined var void while with yield";
const TS = `${JS} abstract any as asserts boolean declare enum implements infer interface is keyof namespace never number object private protected public readonly satisfies string symbol type unique unknown`;
const PYTHON = "False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self cls try while with yield";
const JAVA = "abstract assert boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long native new null package private protected public record return sealed short static super switch synchronized this throw throws transient true false try var void volatile while yield";
const RUST = "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize";
const GO = "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var true false nil bool byte error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint16 uint32 uint64 any make new len cap append";
const SHELL = "if then else elif fi for while until do done case esac in function select time return exit break continue local export readonly declare unset shift source alias eval exec set trap cd echo printf read test true false sudo";
const SQL = "add all alter and as asc begin between by case cast check column commit constraint create cross database default delete desc distinct drop else end except exists foreign from full group having if in index inner insert intersect into is join key left like limit not null offset on or order outer over partition primary references replace returning right rollback select set table then to transaction trigger truncate union unique update using values view when where with int integer bigint text varchar char date timestamp boolean numeric decimal float real serial true false";
const RUBY = "alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo rescue retry return self super then true undef unless until when while yield require require_relative attr_accessor attr_reader puts";
const PHP = "abstract and array as break callable case catch class clone const continue declare default do echo else elseif empty enum extends final finally fn for foreach function global goto if implements include include_once instanceof interface isset match namespace new null or print private protected public readonly require require_once return static switch this throw trait true false try unset use var while yield";
const KOTLIN = "abstract as break by class companion const constructor continue data do else enum false final finally for fun if import in init inline interface internal is lateinit null object open operator override package private protected public return sealed super suspend this throw true try typealias val var vararg when where while";
const SWIFT = "actor as associatedtype async await break case catch class continue default defer deinit do else enum extension fallthrough false fileprivate final for func guard if import in init inout internal is lazy let mutating nil open operator override private protocol public repeat required rethrows return self Self static struct subscript super switch throw throws true try typealias unowned var weak where while";
const CSHARP = "abstract as async await base bool break byte case catch char checked class const continue decimal default delegate do double else enum event explicit extern false finally fixed float for foreach get if implicit in init int interface internal is lock long namespace new null object operator out override params private protected public readonly record ref return sbyte sealed set short sizeof static string struct switch this throw true try typeof uint ulong unchecked unsafe ushort using var virtual void volatile when where while with yield";
const LUA = "and break do else elseif end false for function goto if in local nil not or repeat return then true until while";
const R = "if else repeat while function for in next break TRUE FALSE NULL Inf NaN NA library require return";
const SCALA = "abstract case catch class def do else enum extends false final finally for given if implicit import lazy match new null object override package private protected return sealed super this throw trait true try type using val var while with yield";
const ZIG = "align allowzero and anyframe asm async await break callconv catch comptime const continue defer else enum errdefer error export extern false fn for if inline noalias null or orelse packed pub resume return struct suspend switch test threadlocal true try undefined union unreachable usingnamespace var volatile while";
const DOCKER = "from run cmd label expose env add copy entrypoint volume user workdir arg onbuild stopsignal healthcheck shell as";

const LANGUAGES = {
  c: { words: words(C), ...C_COMMENTS, quotes: QUOTES, directive: "#" },
  cpp: { words: words(CPP), ...C_COMMENTS, quotes: QUOTES, directive: "#" },
  csharp: { words: words(CSHARP), ...C_COMMENTS, quotes: QUOTES, directive: "#" },
  css: { words: words("important from to and not only"), block: ["/*", "*/"], quotes: QUOTES, dashes: true, keys: true, hex: true },
  docker: { words: words(DOCKER), caseless: true, line: ["#"], quotes: QUOTES, variables: true },
  go: { words: words(GO), ...C_COMMENTS, quotes: QUOTES, long: ["`"] },
  ini: { words: words("true false yes no on off"), line: ["#", ";"], quotes: QUOTES, keys: true, sections: true },
  java: { words: words(JAVA), ...C_COMMENTS, quotes: QUOTES, long: ['"""'], decorator: true },
  javascript: { words: words(JS), ...C_COMMENTS, quotes: QUOTES, long: ["`"], decorator: true },
  json: { words: words("true false null"), ...C_COMMENTS, quotes: ['"'], keys: true },
  kotlin: { words: words(KOTLIN), ...C_COMMENTS, quotes: QUOTES, long: ['"""'], decorator: true },
  lua: { words: words(LUA), block: ["--[[", "]]"], line: ["--"], quotes: QUOTES },
  makefile: { words: words("include ifeq ifneq ifdef ifndef else endif define endef export"), line: ["#"], quotes: QUOTES, variables: true, keys: true },
  php: { words: words(PHP), line: ["//", "#"], block: ["/*", "*/"], quotes: QUOTES, variables: true },
  python: { words: words(PYTHON), line: ["#"], quotes: QUOTES, long: ['"""', "'''"], decorator: true },
  r: { words: words(R), line: ["#"], quotes: QUOTES },
  ruby: { words: words(RUBY), line: ["#"], quotes: QUOTES },
  rust: { words: words(RUST), ...C_COMMENTS, quotes: ['"'], ticks: true },
  scala: { words: words(SCALA), ...C_COMMENTS, quotes: ['"'], long: ['"""'], decorator: true, ticks: true },
  shell: { words: words(SHELL), line: ["#"], quotes: QUOTES, variables: true, dashes: true, spaced: true },
  sql: { words: words(SQL), caseless: true, line: ["--"], block: ["/*", "*/"], quotes: QUOTES },
  swift: { words: words(SWIFT), ...C_COMMENTS, quotes: ['"'], long: ['"""'], decorator: true },
  typescript: { words: words(TS), ...C_COMMENTS, quotes: QUOTES, long: ["`"], decorator: true },
  xml: { markup: true },
  yaml: { words: words("true false null yes no on off"), line: ["#"], quotes: QUOTES, keys: true, dashes: true, spaced: true },
  zig: { words: words(ZIG), line: ["//"], quotes: QUOTES },
  diff: { diff: true },
};
const NAMES = {
  "c++": "cpp", cc: "cpp", cxx: "cpp", h: "cpp", hpp: "cpp", cuda: "cpp", cu: "cpp", "c#": "csharp", cs: "csharp", scss: "css", less: "css", dockerfile: "docker", containerfile: "docker",
  golang: "go", toml: "ini", cfg: "ini", conf: "ini", properties: "ini", env: "ini", js: "javascript", jsx: "javascript", mjs: "javascript", node: "javascript", ts: "typescript", tsx: "typescript",
  jsonc: "json", json5: "json", jsonl: "json", kt: "kotlin", make: "makefile", py: "python", python3: "python", pycon: "python", ipython: "python", rb: "ruby", rs: "rust",
  bash: "shell", sh: "shell", curl: "shell", zsh: "shell", console: "shell", terminal: "shell", fish: "shell", postgresql: "sql", mysql: "sql", sqlite: "sql", plsql: "sql", html: "xml", svg: "xml", vue: "xml", xhtml: "xml", yml: "yaml", patch: "diff",
};

/** What is known of a language by the name after the fence; undefined if nothing is. */
export function languageOf(name) {
  const key = name.toLowerCase();
  return LANGUAGES[Object.hasOwn(NAMES, key) ? NAMES[key] : Object.hasOwn(LANGUAGES, key) ? key : ""];
}
