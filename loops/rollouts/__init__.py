"""Where answers come from: the policy samples them, and each says which weights said which token."""
