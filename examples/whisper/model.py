"""A small Whisper listens to melodies and writes down their notes: sound in, tokens out.

ravnest train examples/whisper/model.py:job --nodes 3
"""

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import ravnest as rv

NUM_NOTES, START, END = 8, 8, 9  # notes are the tokens 0 to 7
RATE, NOTE_SAMPLES, HOP = 4000, 512, 64  # samples of sound per second, of a note, and between two columns
NUM_BANDS = 32


def make_melodies(count: int, num_notes: int, seed: int) -> dict[str, Tensor]:
    """Return spectrograms of random melodies, out of tune and noisy, and their notes."""
    generator = torch.Generator().manual_seed(seed)
    notes = torch.randint(NUM_NOTES, (count, num_notes), generator=generator)
    detuned = notes + 0.5 * torch.rand(notes.shape, generator=generator) - 0.25
    pitch = 300 * 2 ** (detuned / 4)  # Hertz; four notes to an octave
    phase = 2 * torch.pi * torch.cumsum(pitch.repeat_interleave(NOTE_SAMPLES, dim=1), dim=1) / RATE
    sound = phase.sin() + torch.randn(phase.shape, generator=generator)
    window = torch.hann_window(2 * NUM_BANDS)
    spectrum = torch.stft(sound, 2 * NUM_BANDS, HOP, window=window, return_complex=True)
    features = spectrum.abs().clamp_min(1e-3).log()[:, :NUM_BANDS, : num_notes * NOTE_SAMPLES // HOP]
    return {"input_features": features, "labels": torch.cat([notes, torch.full((count, 1), END)], dim=1)}


def job(tiny: bool = False) -> rv.Job:
    """Return the job; a Whisper that gets labels makes its decoder's inputs and its loss of them."""
    num_notes = 3 if tiny else 6
    width, depth = (16, 1) if tiny else (64, 2)
    config = WhisperConfig(
        vocab_size=10,
        num_mel_bins=NUM_BANDS,
        d_model=width,
        encoder_layers=depth,
        decoder_layers=depth,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=num_notes * NOTE_SAMPLES // HOP // 2,
        max_target_positions=num_notes + 2,
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
    )
    torch.manual_seed(0)
    return rv.Job(
        WhisperForConditionalGeneration(config),
        make_melodies(64 if tiny else 3200, num_notes, seed=0),
        val_data=make_melodies(32 if tiny else 512, num_notes, seed=1),
        batch_size=32,
        epochs=1 if tiny else 4,
        metrics={"accuracy": lambda out, batch: (out.logits.argmax(-1) == batch["labels"]).float().mean()},
        name="whisper",
    )
