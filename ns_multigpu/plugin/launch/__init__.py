"""How the processes of a run start, meet and agree; what is checked before they do."""
