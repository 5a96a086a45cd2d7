"""The expected output of each program in `examples/`."""

# Regular expressions that the output must match.
EXPECTED_OUTPUT = {
    "attacked": r"^mean +clean accuracy +\d+\.\d% .*100\.0%\n(.*\n)*multi-Krum .* 0\.0%\n",
    "around_scaffold": r"10 +\d+\.\d% +\d+\.\d% \(FedCOG awake\)\nbytes .*: ([\d,]+) and \1\n",
    "async_rounds": r"^synchronous +12 rounds in 1200 .*\nasynchronous +40 rounds in 250 ",
    "bare_loop": r"round 20: \d+\.\d% \(FedCOG\), last",
    "client_tests": r"FedAvg: mean \d+\.\d%, worst .*\nDitto: mean \d+\.\d%, .*ece 0\.\d+",
    "compare_methods": r"fedavg  .*\nfedprox  .*\nfedavg\+fedcog  ",
    "data_by_name": r"600 \+ 300 examples of float32 \[4\], 3 classes\)\n0 \[(.*\n)*last \d+\.\d%",
    "generated_images": r"the last row is real\nlast .*generated\.png",
    "learning_rate_schedule": r"constant +lr (0\.100 ){12}.*\ncosine +lr 0\.033 .* 0\.005  last",
    "my_method": "both keep the contract",
    "my_network": r"last \d+\.\d%; the same",
    "networks_by_name": r"mlp +9,610 parameters, last \d+\.\d%\nsmall ",
    "own_augmentation": r"plain: last \d+\.\d%\naugmented: last \d+\.\d%",
    "own_data_and_model": r"last \d+\.\d%, best",
    "own_generator": r"last \d+\.\d%, best",
    "own_images": r"240 \+ 60 examples of uint8 \[1, 16, 16\], 2 classes\)\nlast \d+\.\d%, best",
    "own_torch_dataset": r"400 \+ 200 examples of float32 \[32\], 3 classes\)\nlast \d+\.\d%, best",
    "personalise": r"Ditto with FedCOG +\d+\.\d% +\d+\.\d% +\d+\.\d%\n",
    "recipes": r"^$",
    "stop_and_resume": r"stopped after round 5 of 8\n(.*\n)*last .*; the checkpoints are the same",
    "tables_and_plots": r"\| method \|(.*\n)*\| fedprox \| .* \(n = 3\) \|\n(.*\n)*  fedavg: \d",
    "text": r"fedavg: last \d+\.\d+\nfedavg\+fedcog: last \d+\.\d+",
    "unequal_devices": r"the global model, last: \d+\.\d%",
}
