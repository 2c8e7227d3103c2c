"""TensorRT-LLM's LLM API where the real one cannot be: the names, checks and asynchronous manners, no model.

Tokens are bytes. The answer to a prompt is its bytes reversed, over and over, until `max_tokens`; after a newline the
end-of-text id follows, unless it is ignored. Every step emits the prefill token or 0..max_draft_len accepted drafts and
one more token. Prompts that begin with one of these words are special:

    break     the engine fails this request after its first token
    refuse    `generate_async` itself refuses it
"""

__version__ = "1.2.1"
