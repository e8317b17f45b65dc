"""Fine-tuning of a Hugging Face model: text becomes tokens, adapters are trained, a folder comes back."""
