"""Attention whose epilogue closes a skip."""
