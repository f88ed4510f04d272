"""The face: what a user imports or types. Importing it loads neither torch, ray nor mlflow until a name is used."""
