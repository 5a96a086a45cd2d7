"""Numbers that the paper prints, table by table (Ye et al., ICLR 2024)."""

from fedcog.studies.study import MultiLabelMetric

# Table 1: accuracy and standard deviation by method, in the order of `settings.SETTINGS`.
MAIN_COMPARISON = {
    "FedAvg": "73.07 0.08 64.11 0.78 64.36 0.11 50.55 0.45 39.07 0.36 30.93 0.23",
    "FedAvgM": "76.81 0.48 67.73 0.65 64.36 0.33 51.32 0.74 39.21 0.19 30.97 0.11",
    "FedProx": "73.35 0.07 64.44 1.36 63.91 0.36 53.51 0.32 38.81 0.03 30.76 0.21",
    "SCAFFOLD": "77.02 0.63 58.47 3.05 64.36 0.43 48.35 1.86 42.25 0.40 34.27 0.22",
    "MOON": "73.21 0.28 63.11 1.08 63.65 0.04 51.01 1.54 39.34 0.18 31.17 0.13",
    "FedSAM": "76.44 0.06 68.14 0.60 61.38 0.23 50.76 0.36 37.97 0.26 30.75 0.11",
    "VHL": "73.08 0.89 70.26 1.79 60.81 1.33 51.60 0.98 37.55 1.06 28.41 0.48",
    "FedExP": "65.03 1.14 59.49 1.69 48.96 2.11 37.97 1.75 35.14 1.25 22.47 0.29",
    "FedDecorr": "72.77 0.70 60.70 4.59 63.40 0.29 47.53 1.99 37.68 0.40 27.08 0.29",
    "FedReg": "70.75 0.23 69.89 0.74 55.40 0.33 46.64 0.42 30.95 0.39 23.70 0.31",
    "FedGen": "72.64 1.27 61.34 2.44 62.45 0.40 49.12 0.51 37.99 0.23 26.93 0.15",
    "FedCOG": "77.34 0.07 73.68 0.38 64.83 0.12 54.00 0.84 42.88 0.02 34.80 0.42",
}

# Table 1, last column.
MAIN_AVERAGES = {
    "FedAvg": 53.68,
    "FedAvgM": 55.07,
    "FedProx": 54.13,
    "SCAFFOLD": 54.12,
    "MOON": 53.58,
    "FedSAM": 54.24,
    "VHL": 53.62,
    "FedExP": 44.84,
    "FedDecorr": 51.53,
    "FedReg": 49.52,
    "FedGen": 51.75,
    "FedCOG": 57.92,
}

# Table 2: C-P, C-R, C-F1 and O-F1 by method.
FLAIR = {
    "FedAvg": "30.76 14.23 18.30 44.53",
    "FedAvgM": "29.76 16.76 20.44 48.43",
    "FedProx": "32.27 14.95 18.66 45.71",
    "SCAFFOLD": "31.10 12.37 16.74 42.50",
    "MOON": "31.41 14.71 18.83 44.99",
    "FedSAM": "32.33 14.39 17.94 46.18",
    "FedDecorr": "33.44 13.36 17.51 41.89",
    "FedExP": "29.14 15.70 19.64 46.57",
    "FedCOG": "37.87 18.78 20.89 51.35",
}

FLAIR_METRICS: dict[str, MultiLabelMetric] = {
    "C-P": "c_p",
    "C-R": "c_r",
    "C-F1": "c_f1",
    "O-F1": "o_f1",
}
"""The columns of Table 2."""

# Table 3, by method: without and with FedCOG, for CIFAR-10 NIID-1 and NIID-2, FLAIR O-F1 and C-F1.
PLUG_AND_PLAY = {
    "fedavg": "63.34 64.47 49.30 49.50 47.91 51.35 20.63 20.89",
    "fedavgm": "61.71 64.63 44.73 45.14 48.77 51.60 20.11 21.98",
    "fedprox": "64.15 64.87 50.35 50.89 45.71 54.57 18.66 19.08",
    "scaffold": "63.67 65.36 46.47 51.26 42.50 45.22 16.74 18.96",
    "moon": "62.56 63.24 49.64 50.72 44.99 52.78 18.83 19.92",
}

# Table 4: seconds of a client with their standard deviation, and accuracy after 51 rounds.
CLIENT_SECONDS = {
    "FedAvg": (983.0, 100.0),
    "FedProx": (1051.0, 87.0),
    "MOON": (1276.0, 147.0),
    "FedCOG": (1001.0, 98.0),
}
ACCURACY_AFTER_51_ROUNDS = {"FedAvg": 63.34, "FedProx": 64.57, "MOON": 64.44, "FedCOG": 65.59}

# Table 5: accuracy on CIFAR-10 NIID-1 and NIID-2.
ABLATION = {
    "Gaussian noise, soft": (60.98, 49.67),
    "global model, soft": (64.72, 51.61),
    "global and local, hard": (63.59, 51.64),
    "FedCOG": (64.88, 53.20),
}

# Tables 6, 7 and 8, by value of the varied setting: FedAvg, FedProx, MOON, FedCOG.
LOCAL_ITERATIONS: dict[float, str] = {
    200: "61.46 61.39 61.12 61.73",
    400: "64.68 63.90 63.59 65.61",
    600: "63.45 62.13 63.27 64.89",
    800: "62.39 61.48 62.81 64.98",
}
PARTICIPATION: dict[float, str] = {
    0.1: "18.64 20.42 20.84 21.36",
    0.2: "37.44 38.36 35.55 43.44",
    0.3: "41.47 42.38 41.03 48.28",
    0.4: "46.73 47.42 46.57 48.37",
}
NUM_CLIENTS: dict[float, str] = {
    5: "61.00 61.28 60.64 61.72",
    10: "61.77 61.90 60.41 61.98",
    20: "57.51 57.08 56.25 57.67",
    30: "58.03 58.98 58.35 59.14",
}

# Table 9: accuracy of the clients' own models.
PERSONALIZED = {
    "FedAvg + FT": 76.16,
    "FedProx + FT": 76.38,
    "FedRep": 74.90,
    "Ditto": 76.57,
    "FedCOG + FT": 78.34,
}

# Table 10: accuracy by number of generation steps.
GENERATION_STEPS = {0: 60.98, 50: 65.40, 100: 65.44, 500: 64.80, 1000: 64.92}

# Table 11: seconds by number of generated inputs.
GENERATION_SECONDS = {
    16: 0.72,
    32: 0.78,
    64: 0.79,
    128: 0.80,
    256: 0.81,
    512: 0.83,
    1024: 1.27,
}


def parse_numbers(text: str) -> list[float]:
    """Return the numbers of a table row."""
    return [float(word) for word in text.split()]
