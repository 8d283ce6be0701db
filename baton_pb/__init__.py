"""Generated protocol code; see proto/ and tools/protoc.sh."""
