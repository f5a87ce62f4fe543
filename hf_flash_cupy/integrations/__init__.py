"""Where other libraries meet this one: Hugging Face Transformers' attention and mask interfaces."""
