"""Where keys and values lie: tensors only, no policy and no model."""
