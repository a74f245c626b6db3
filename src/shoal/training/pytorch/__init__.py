"""The backend ``shoal`` of ``torch.distributed``, in parts."""
