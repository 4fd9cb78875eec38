"""The model list and a single model."""


def test_list_names_the_default_model(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny-chat"]
    assert models[0].object == "model"


def test_retrieve_gives_the_listed_model(client):
    listed = client.models.list().data[0]
    retrieved = client.models.retrieve("tiny-chat")
    # It also says who serves it.
    assert retrieved.to_dict().items() >= listed.to_dict().items()
