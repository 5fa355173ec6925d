"""Exchange of rows and pixels between ranks: operators of the legs."""
