// What the commands of TeX stand for: tables for math.js.

const pairs = (text) => Object.assign(Object.create(null), Object.fromEntries(text.trim().split(/\s+/).map((pair) => [pair.slice(0, pair.indexOf("=")), pair.slice(pair.indexOf("=") + 1)])));

/** Letters and signs that are read like letters. */
export const LETTERS = pairs(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ
  omicron=ο pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω
  Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
  ell=ℓ hbar=ℏ imath=ı jmath=ȷ Re=ℜ Im=ℑ wp=℘ aleph=ℵ beth=ℶ partial=∂ nabla=∇ infty=∞ emptyset=∅ varnothing=∅ angle=∠
  triangle=△ square=□ Box=□ checkmark=✓ degree=° top=⊤ bot=⊥ prime=′ dagger=† ddagger=‡ S=§ P=¶ copyright=© pounds=£ euro=€
  hslash=ℏ eth=ð mho=℧ clubsuit=♣ diamondsuit=♢ heartsuit=♡ spadesuit=♠ flat=♭ natural=♮ sharp=♯ %=% #=# _=_ &=& $=$
`);

/** Operators, relations and arrows. */
export const OPERATORS = pairs(`
  pm=± mp=∓ times=× div=÷ cdot=⋅ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ oslash=⊘ odot=⊙ wedge=∧ land=∧ vee=∨ lor=∨
  cap=∩ cup=∪ setminus=∖ smallsetminus=∖ sqcap=⊓ sqcup=⊔ uplus=⊎ amalg=⨿ wr=≀ diamond=⋄ bigcirc=◯ rtimes=⋊ ltimes=⋉ intercal=⊺
  leq=≤ le=≤ geq=≥ ge=≥ leqslant=⩽ geqslant=⩾ ll=≪ gg=≫ neq=≠ ne=≠ equiv=≡ approx=≈ cong=≅ sim=∼ simeq=≃ propto=∝ doteq=≐ asymp=≍
  prec=≺ succ=≻ preceq=⪯ succeq=⪰ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ supsetneq=⊋ sqsubseteq=⊑ sqsupseteq=⊒
  in=∈ ni=∋ notin=∉ mid=∣ nmid=∤ parallel=∥ nparallel=∦ perp=⟂ vdash=⊢ dashv=⊣ models=⊨ vDash=⊨ forall=∀ exists=∃ nexists=∄ neg=¬ lnot=¬
  therefore=∴ because=∵ triangleq=≜ coloneqq=≔ lesssim=≲ gtrsim=≳ bowtie=⋈ smile=⌣ frown=⌢ ltimes=⋉ triangleleft=◁ triangleright=▷
  to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ iff=⟺ implies=⟹ impliedby=⟸
  longrightarrow=⟶ longleftarrow=⟵ longleftrightarrow=⟷ Longrightarrow=⟹ Longleftarrow=⟸ Longleftrightarrow=⟺ mapsto=↦ longmapsto=⟼
  hookrightarrow=↪ hookleftarrow=↩ uparrow=↑ downarrow=↓ updownarrow=↕ Uparrow=⇑ Downarrow=⇓ nearrow=↗ searrow=↘ swarrow=↙ nwarrow=↖
  rightharpoonup=⇀ rightharpoondown=⇁ leftharpoonup=↼ leftharpoondown=↽ rightleftharpoons=⇌ rightsquigarrow=⇝ leadsto=⇝ twoheadrightarrow=↠
  ldots=… dots=… dotsc=… dotso=… cdots=⋯ dotsb=⋯ dotsm=⋯ dotsi=⋯ vdots=⋮ ddots=⋱ colon=: surd=√ backslash=\\ |=∥
`);

/** Fences: those that grow between \left and \right, and as commands of their own. */
export const FENCES = pairs(`
  lbrace={ rbrace=} {={ }=} lbrack=[ rbrack=] langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ lvert=| rvert=| lVert=‖ rVert=‖
  vert=| Vert=‖ |=‖ lgroup=⟮ rgroup=⟯ llbracket=⟦ rrbracket=⟧ ulcorner=⌜ urcorner=⌝ llcorner=⌞ lrcorner=⌟
  uparrow=↑ downarrow=↓ updownarrow=↕ Uparrow=⇑ Downarrow=⇓ backslash=\\
`);

/** Large operators; those of integrals have their limits beside them. */
export const LARGE = pairs(`
  sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigvee=⋁ bigwedge=⋀ bigoplus=⨁ bigotimes=⨂ bigodot=⨀ biguplus=⨄ bigsqcup=⨆
  int=∫ iint=∬ iiint=∭ oint=∮ oiint=∯
`);
export const INTEGRALS = new Set("∫∬∭∮∯");

/** Functions written upright. Those of LIMITS have what is below them below them. */
export const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker hom arg deg gcd max min sup inf lim limsup liminf Pr argmax argmin".split(" "),
);
export const LIMITS = new Set("det gcd max min sup inf lim limsup liminf Pr argmax argmin".split(" "));

/** Marks above or below; those of WIDE grow with what they belong to. */
export const ACCENTS = pairs("hat=^ widehat=^ check=ˇ bar=¯ overline=¯ vec=→ overrightarrow=→ overleftarrow=← dot=˙ ddot=¨ dddot=⃛ tilde=~ widetilde=~ acute=´ grave=` breve=˘ mathring=˚ overbrace=⏞");
export const UNDER = pairs("underline=_ underbrace=⏟");
export const WIDE = new Set("widehat overline overrightarrow overleftarrow widetilde overbrace underline underbrace".split(" "));

/** Widths of spaces. */
export const SPACES = { ",": "0.1667em", ":": "0.2222em", ">": "0.2222em", ";": "0.2778em", "!": "-0.1667em", " ": "0.25em", "~": "0.25em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.1667em" };

const EXCEPTIONS = pairs(`
  bb.C=ℂ bb.H=ℍ bb.N=ℕ bb.P=ℙ bb.Q=ℚ bb.R=ℝ bb.Z=ℤ cal.B=ℬ cal.E=ℰ cal.F=ℱ cal.H=ℋ cal.I=ℐ cal.L=ℒ cal.M=ℳ cal.R=ℛ cal.e=ℯ cal.g=ℊ cal.o=ℴ
  frak.C=ℭ frak.H=ℌ frak.I=ℑ frak.R=ℜ frak.Z=ℨ it.h=ℎ
`);
/** Where the capital letters, the small ones and the digits of a form begin in Unicode; 0 where there are none. */
const FORMS = { bf: [0x1d400, 0x1d41a, 0x1d7ce], it: [0x1d434, 0x1d44e, 0], bi: [0x1d468, 0x1d482, 0x1d7ce], cal: [0x1d49c, 0x1d4b6, 0], frak: [0x1d504, 0x1d51e, 0], bb: [0x1d538, 0x1d552, 0x1d7d8], sf: [0x1d5a0, 0x1d5ba, 0x1d7e2], tt: [0x1d670, 0x1d68a, 0x1d7f6] };
const STARTS = ["A", "a", "0"];
const LENGTHS = [26, 26, 10];
export const ALPHABETS = { mathbf: "bf", textbf: "bf", bold: "bf", boldsymbol: "bi", bm: "bi", mathit: "it", textit: "it", mathcal: "cal", mathscr: "cal", mathfrak: "frak", mathbb: "bb", mathsf: "sf", textsf: "sf", mathtt: "tt", texttt: "tt" };

/** A letter or digit in another form, such as a bold one; other signs stay. */
export function formed(sign, form) {
  const special = EXCEPTIONS[`${form}.${sign}`];
  if (special || !FORMS[form]) return special ?? sign;
  for (const [i, first] of STARTS.entries()) {
    const index = sign.charCodeAt(0) - first.charCodeAt(0);
    if (sign.length === 1 && index >= 0 && index < LENGTHS[i] && FORMS[form][i]) return String.fromCodePoint(FORMS[form][i] + index);
  }
  return sign;
}
