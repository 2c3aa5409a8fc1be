"""MNIST with the Trainer of Hugging Face's Transformers over hvd. Needs the packages transformers and accelerate.

torchrun --nproc-per-node 2 mnist_trainer.py [--data FOLDER]
"""

import tempfile

import torch
import torch.distributed as dist

import mnist_data


class Classifier(torch.nn.Module):
    """The Trainer passes the fields of a sample and expects the loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mnist_data.Net()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answers = self.net(images)
        return torch.nn.functional.cross_entropy(answers, labels), answers


def collate(samples: list) -> dict[str, torch.Tensor]:
    return {"images": torch.stack([image for image, _ in samples]), "labels": torch.tensor([int(label) for _, label in samples])}


def main() -> None:
    options = mnist_data.options(__doc__)
    mnist_data.require("accelerate")
    mnist_data.require("transformers")
    from transformers import Trainer, TrainingArguments

    dist.init_process_group("hvd")  # before the TrainingArguments, which then use this group
    torch.manual_seed(0)
    train, test = mnist_data.data_sets(options.data)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, num_train_epochs=options.epochs, per_device_train_batch_size=32,
                                      learning_rate=0.002, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
        trainer = Trainer(model=Classifier(), args=arguments, train_dataset=train, eval_dataset=test, data_collator=collate)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
