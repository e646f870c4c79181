"""What is learnt: one class a task, which says what data, model, loss and saved directory are."""
