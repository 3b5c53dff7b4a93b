"""Lists of RecTools for the notebook `compare.ipynb`, in an environment of their own.

    python -m venv rectools && rectools/bin/pip install rectools==0.19.0
    rectools/bin/python rectools_lists.py train.csv rectools_lists.csv

`train.csv` has the columns user, item and order, and comes from the notebook. The result has the
columns user, items (the best first) and method.
"""

import sys

import pandas as pd
from implicit.nearest_neighbours import BM25Recommender
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import EASEModel, ImplicitItemKNNWrapperModel

LENGTH = 11  # one more than a list has: the validation item goes

train = pd.read_csv(sys.argv[1])
interactions = pd.DataFrame(
    {
        Columns.User: train["user"],
        Columns.Item: train["item"],
        Columns.Weight: 1.0,
        Columns.Datetime: pd.to_datetime(train["order"], unit="s"),
    }
)
dataset = Dataset.construct(interactions)
models = {
    "RecTools EASE": EASEModel(regularization=100.0),
    "RecTools ItemKNN, BM25": ImplicitItemKNNWrapperModel(BM25Recommender(K=50)),
}
lists = []
for method, model in models.items():
    model.fit(dataset)
    users = interactions[Columns.User].unique()
    found = model.recommend(users, dataset, k=LENGTH, filter_viewed=True)
    of_user = found.sort_values(Columns.Rank).groupby(Columns.User)[Columns.Item]
    table = of_user.agg(lambda items: " ".join(map(str, items))).rename("items").reset_index()
    lists.append(table.rename(columns={Columns.User: "user"}).assign(method=method))
pd.concat(lists).to_csv(sys.argv[2], index=False)
