"""Folders with the tokenizer, template and processor of vision models, real in form and small in size.

The names and shapes are those of the families' published folders, with smaller pictures; templates are theirs
without what needs tools. Tokens are bytes, plus each family's special ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Settings = Mapping[str, object]
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def write_json(folder: Path, **files: Settings) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def write_tokenizer(folder: Path, special: Sequence[str], **settings: object) -> None:
    """Bytes, then `special`; a beginning-of-sequence token is put before every text, as usual."""
    vocabulary = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bos = settings.get("bos_token")
    if isinstance(bos, str):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **settings})


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def qwen(folder: Path, family: str, template: str | None = QWEN_TEMPLATE) -> None:
    told = {} if template is None else {"chat_template": template}
    write_tokenizer(folder, QWEN_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", **told)
    write_json(
        folder,
        config={"model_type": family, "image_token_id": 261},
        preprocessor_config={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 16 if family.startswith("qwen3") else 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 56 * 56,
            "max_pixels": 224 * 224,
            "image_mean": MEAN,
            "image_std": STD,
        },
    )


def gemma3(folder: Path, family: str) -> None:
    extra = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    special = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *extra.values())
    write_tokenizer(
        folder,
        special,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=extra,
        **extra,
    )
    template = (
        "{{ bos_token }}{%- for message in messages -%}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
        "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
        "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
        "{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    )
    write_json(
        folder,
        config={"model_type": family, "image_token_index": 261},
        chat_template={"chat_template": template},
        processor_config={"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        preprocessor_config={
            "image_processor_type": "Gemma3ImageProcessor",
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": MEAN,
            "image_std": STD,
            "image_seq_length": 4,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": 56, "width": 56},
        },
    )


def llava(folder: Path, family: str) -> None:
    special = ("<unk>", "<s>", "</s>", "<image>", "<pad>")
    write_tokenizer(folder, special, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    template = (
        "{% for message in messages %}{% if message['role'] != 'system' %}"
        "{{ message['role'].upper() + ': '}}{% endif %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
        "{{ '<image>\n' }}{% endfor %}{% if message['role'] != 'assistant' %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] + ' '}}{% endfor %}{% else %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    write_json(
        folder,
        config={"model_type": family, "image_token_index": 259},
        chat_template={"chat_template": template},
        processor_config={
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
        preprocessor_config={
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": 42, "width": 42},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": MEAN,
            "image_std": STD,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": 42},
        },
    )


def pixtral(folder: Path, family: str) -> None:
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    write_tokenizer(folder, special, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    template = (
        "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}"
        "{%- else %}{{- '[INST]' }}{%- for block in message['content'] %}"
        "{%- if block['type'] == 'text' %}{{- block['text'] }}"
        "{%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}"
        "{%- else %}{{- raise_exception('Only text and image blocks are supported!') }}{%- endif %}"
        "{%- endfor %}{{- '[/INST]' }}{%- endif %}{%- elif message['role'] == 'assistant' %}"
        "{{- message['content'] + eos_token }}"
        "{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}"
        "{%- endfor %}"
    )
    patch, merge = (16, 1) if family == "pixtral" else (14, 2)
    write_json(
        folder,
        config={"model_type": family, "image_token_index": 262},
        chat_template={"chat_template": template},
        processor_config={
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "image_token": "[IMG]",
            "patch_size": patch,
            "spatial_merge_size": merge,
            "processor_class": "PixtralProcessor",
        },
        preprocessor_config={
            "image_processor_type": "PixtralImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": MEAN,
            "image_std": STD,
            "patch_size": {"height": patch, "width": patch},
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": 128},
        },
    )


def idefics3(folder: Path, family: str) -> None:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>")
    write_tokenizer(
        folder,
        (*special, "<end_of_utterance>", "<global-img>", *places),
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
    )
    template = (
        "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    write_json(
        folder,
        config={"model_type": family, "image_token_id": 260},
        chat_template={"chat_template": template},
        processor_config={"image_seq_len": 4, "processor_class": f"{name}Processor"},
        preprocessor_config={
            "image_processor_type": f"{name}ImageProcessor",
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": MEAN,
            "image_std": STD,
            "max_image_size": {"longest_edge": 64},
            "resample": 1,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": 256},
        },
    )


FOLDERS: dict[str, Callable[[Path, str], None]] = {
    "qwen2_vl": qwen,
    "qwen2_5_vl": qwen,
    "qwen3_vl": qwen,
    "qwen3_5": qwen,
    "gemma3": gemma3,
    "llava": llava,
    "pixtral": pixtral,
    "mistral3": pixtral,
    "idefics3": idefics3,
    "smolvlm": idefics3,
}


def write_folder(folder: Path, family: str) -> Path:
    """Everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    FOLDERS[family](folder, family)
    return folder
