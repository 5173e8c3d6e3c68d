"""Run one generation: prompts in, deltas of its choices out.

Every endpoint and the offline API translate to and from this one form. It knows nothing of HTTP or of any endpoint's
JSON.

- `request`: describe prompts and a request; make engine requests of them
- `chat_request`: make the prompt and the parameters of a conversation
- `prompts`: turn text and chats into token ids
- `structured`, `json_schema`, `structural_tag`, `tag_format`: make the grammar that an output must match
- `schema_errors`: say why a grammar does not compile, with the place in a schema
- `ecma`, `formats`, `gbnf`: read regular expressions, formats and GBNF as others do, and not as llguidance does
- `keyword_shapes`, `one_of`, `numbers`: what values keywords have, which cases exclude each other, which numbers are
  read exactly
- `chat_guide`: make outputs of chats be tool calls, and end their reasoning
- `tool_grammar`, `tool_arguments`, `tool_schema`: write the grammar of calls
- `references`: lets parts of a schema stand without the rest
- `grammar_text`: writes the rules of a grammar, for calls and for structural tags
- `bad_words`: turn bad words into token ids
- `truncation`, `max_tokens`: cut prompts, fit max_tokens to the context window
- `seeds`: choose the seed of a prompt
- `generation`: submit a request, hand out its deltas, abort it
- `ending`: what log and trace say of a generation that has ended
- `choice`: turn the tokens of one choice into text and logprobs
- `labels`: where the labels of a question are read, and how probable each is
- `stops`: find stop strings, check stop tokens
- `logprobs`, `prompt_scores`, `output`, `usage`: the results
- `errors`: the fault of an engine as an exception
"""
