"""The token channel: an engine in one process, used from others through the Engine protocol."""

from .remote import RemoteEngine
from .security import ChannelKeys
from .server import EngineServer

__all__ = ["ChannelKeys", "EngineServer", "RemoteEngine"]
