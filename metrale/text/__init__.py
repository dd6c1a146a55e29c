"""Text in and out: tokenizers, chat templates, incremental detokenization and stop strings.

Nothing is imported here: `tokenizers` and `jinja2` load when a tokenizer is opened and when a template is rendered.
"""
